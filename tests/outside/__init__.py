"""Other projects' tests over casckpt: an adapter for each project, and what runs in their processes.

``tools/outside NAME --source CHECKOUT`` runs them. An adapter is a module with:

- ``TESTS``: what to give to pytest, relative to the checkout;
- ``FOLDER``, only if tests write beside themselves: the folder of the checkout to which ``TESTS`` is relative. The
  tests run in a copy of it;
- ``SOURCE``: the folder of the checkout that holds the project's package, or None if the installed one is tested;
- ``SAVES``: the functions and methods of the project that save. A test that calls one must write to a store;
- ``REASONS``: why a test ends differently, by a regular expression that is searched in ``test: error``;
- ``install(store)``: puts casckpt in place of the project's storage. ``store()`` returns the path of the current test's
  store.

Adapters run without the package ``tests``, because other projects have packages of this name. They import only casckpt
and the project.
"""
