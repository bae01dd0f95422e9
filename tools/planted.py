"""Bugs to be planted, one at a time: each is a promise of casckpt broken at one place, and the tests that notice."""

from __future__ import annotations

from dataclasses import dataclass

from drawn import DRAWN


@dataclass(frozen=True)
class Planted:
    """``before`` stands once in ``file``, and ``after`` in its place is the bug. ``tests``: the files that notice."""

    name: str
    file: str
    before: str
    after: str
    tests: str


REWRITING, REWRITTEN = "tests/upkeep/test_rewriting.py", "tests/checkpoint/loading/test_rewritten.py"

PLANTED = (
    *(Planted(name, file, *rest) for file, drawn in DRAWN.items() for name, *rest in drawn),
    Planted(
        "a save reads what lives before its transaction begins",
        "casckpt/checkpoint/saving/leader.py",
        """        self._transaction = begin(self.repo, run, step, after=[latest] if latest else [], seen=seen)
        self._parent = newest_reusable(self.repo, run)
""",
        """        self._parent = newest_reusable(self.repo, run)
        self._transaction = begin(self.repo, run, step, after=[latest] if latest else [], seen=seen)
""",
        "tests/checkpoint/saving/test_promises.py",
    ),
    Planted(
        "a save reuses what only a purged checkpoint names",
        "casckpt/repository/runs/following.py",
        "    return commit.live\n",
        "    return commit.last != 'revoked'\n",
        "tests/checkpoint/saving/test_promises.py tests/repository/runs/test_following.py",
    ),
    Planted(
        "a gc takes what was purged for live",
        "casckpt/repository/folding.py",
        "[commit for commit in self._sorted if commit.live]",
        "[commit for commit in self._sorted if commit.last != 'revoked']",
        "tests/upkeep/gc/test_gc.py",
    ),
    Planted(
        "a record is announced when it is there",
        "casckpt/repository/commits.py",
        """    announce(repo, [(record.txid, 0), *replaced], seen=seen)
    try:
        repo.put_record(key, record)
""",
        """    try:
        repo.put_record(key, record)
        announce(repo, [(record.txid, 0), *replaced], seen=seen)
""",
        "tests/repository/runs/test_announcements.py",
    ),
    Planted(
        "a purge is not announced",
        "casckpt/repository/commits.py",
        "    announce(repo, [(commit.txid, number)])\n",
        "    announce(repo, [(commit.txid, number)] if kind is not Purged else [])\n",
        "tests/repository/runs/test_announcements.py",
    ),
    Planted(
        "what was announced last is taken for the latest",
        "casckpt/repository/runs/following.py",
        "if one is not None and one.seen is not None and one.seen >= low - 1)",
        "if one is not None)",
        "tests/repository/runs/test_following.py",
    ),
    Planted(
        "a rewrite is visible as soon as it is committed",
        "casckpt/repository/folding.py",
        "        return UNSETTLED, None\n",
        "        return STANDS, None\n",
        REWRITING,
    ),
    Planted(
        "a rewriter who finds its number taken takes the next one",
        "casckpt/upkeep/rewriting.py",
        "    number = base.number + 1\n",
        "    number = refresh(repo, base).number + 1\n",
        REWRITING,
    ),
    Planted(
        "a rewrite of a rewrite stands although the first one does not",
        "casckpt/repository/folding.py",
        "    if base.standing == VOID or base.replaced == (number, commit.txid):\n        return base.standing, None\n",
        "    if base.replaced == (number, commit.txid):\n        return STANDS, None\n",
        REWRITING,
    ),
    Planted(
        "a rewrite stands although its base was restored",
        "casckpt/repository/folding.py",
        "        replaced=link if link is not None and link[0] > restored else None,\n",
        "        replaced=link,\n",
        REWRITING,
    ),
    Planted(
        "a rewrite that is not settled may be forgotten",
        "casckpt/repository/commits.py",
        "    if commit.standing != STANDS and wanted",
        "    if commit.standing == VOID and wanted",
        REWRITING,
    ),
    Planted(
        "a gc never takes the number that a dead rewriter wants",
        "casckpt/upkeep/gc/settling.py",
        "            keep(repo, *one.replaces)\n",
        "            pass\n",
        REWRITING,
    ),
    Planted(
        "a rewriter without an answer gives up with its number free",
        "casckpt/upkeep/rewriting.py",
        "        keep(repo, base.txid, number)\n    now = refresh(repo, made)\n    if now.standing == VOID:\n",
        "    now = refresh(repo, made)\n    if now.standing != 'stands':\n",
        REWRITING,
    ),
    Planted(
        "what is forgotten is rewritten",
        "casckpt/upkeep/rewriting.py",
        "not now.visible or now.txid",
        "not now.live or now.txid",
        REWRITING,
    ),
    Planted(
        "what a listing shows as gone is not looked for again",
        "casckpt/repository/commits.py",
        "listed = _look_again(repo, with_logs(listed, logs), logs)",
        "listed = with_logs(listed, logs)",
        REWRITING,
    ),
    Planted(
        "what is not visible when logs are followed is not looked for again",
        "casckpt/repository/commits.py",
        "    if chain[-1].visible or [refresh(repo, one) for one in chain] == chain:\n",
        "    if chain:\n",
        REWRITING,
    ),
    Planted(
        "what replaced a checkpoint is not looked for where a listing lacks it",
        "casckpt/repository/commits.py",
        "    _add_linked(repo, listed, logs)\n",
        "",
        REWRITING,
    ),
    Planted(
        "a hole in a log that is listed is not read",
        "casckpt/repository/commits.py",
        "        for number in range(highest):\n",
        "        for number in {0, highest - 1}:\n",
        REWRITING,
    ),
    Planted(
        "a look at a run does not follow what was replaced",
        "casckpt/repository/runs/following.py",
        "or commit.replaced is None else [follow(repo, commit)]",
        "or commit.replaced is None else []",
        REWRITING,
    ),
    Planted(
        "the latest is that of the greatest transaction, not of the last save",
        "casckpt/repository/folding.py",
        "        return self.origin, *self.rank\n",
        "        return self.txid, *self.rank\n",
        REWRITING,
    ),
    Planted(
        "a look at a run takes the first rewrite for the latest",
        "casckpt/repository/runs/following.py",
        "            if best is not None and best.origin >= txid:\n",
        "            if best is not None:\n",
        REWRITING,
    ),
    Planted(
        "the record that lets a rewrite stand is not announced",
        "casckpt/repository/commits.py",
        "announce(repo, [(record.txid, 0), *replaced], seen=seen)\n",
        "announce(repo, [(record.txid, 0)], seen=seen)\n",
        REWRITING,
    ),
    Planted(
        "a rewrite that has dropped something stands in for all",
        "casckpt/repository/folding.py",
        "            if other is None or not (loses or commit in Holdings([other])):\n",
        "            if other is None:\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "tags bar rewrites that are void",
        "casckpt/upkeep/gc/retiring.py",
        "one in seen or one.standing == VOID or",
        "one in seen or",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a load whose bytes are gone fails",
        "casckpt/checkpoint/loading/download.py",
        "            other = self._other(tried)\n",
        "            other = None\n",
        REWRITTEN,
    ),
    Planted(
        "a load whose bytes are gone looks at rewrites alone",
        "casckpt/repository/manifests.py",
        "list_commits(repo).standing() if one.id == id)",
        "list_commits(repo).standing() if one.id == id and one.replaces)",
        REWRITTEN,
    ),
    Planted(
        "a load keeps the places of the commit that it began with",
        "casckpt/checkpoint/loading/download.py",
        "        left = [want._replace(table=None) for want in wants]\n",
        "        left = list(wants)\n",
        REWRITTEN,
    ),
    Planted(
        "a copy names the base of a rewrite",
        "casckpt/upkeep/copies/replicating.py",
        "            replaces=None,  # that is not there, or is another commit there\n",
        "",
        "tests/upkeep/copies/test_copying.py",
    ),
    Planted(
        "a copy is as new as its transaction",
        "casckpt/upkeep/copies/replicating.py",
        "            origin=None if self.commit.origin == txid else self.commit.origin,\n",
        "            origin=None,\n",
        "tests/upkeep/copies/test_copying.py",
    ),
    Planted(
        "a visible checkpoint is safe where it is forgotten",
        "casckpt/upkeep/copies/mirror.py",
        "(lives if commit.is_forgotten else visible)",
        "lives",
        "tests/store/test_mirror.py",
    ),
    Planted(
        "what was rewritten without a loss is to be safe in the mirror itself",
        "casckpt/upkeep/gc/retiring.py",
        "    standins = {commit.txid: listed.standin(commit, loses=loses) for commit in wanted}\n",
        "    standins = {commit.txid: commit for commit in wanted}\n",
        "tests/store/test_mirror.py",
    ),
    Planted(
        "a number without an answer is skipped",
        "casckpt/repository/runs/announcements.py",
        "            except Conflict:\n                (found,)",
        "            except CasckptError:\n                (found,)",
        "tests/repository/runs/test_announcements.py",
    ),
    Planted(
        "what was announced and is not there yet is forgotten",
        "casckpt/repository/runs/following.py",
        "    if commit is not None and not commit.live:\n",
        "    if commit is None or not commit.live:\n",
        "tests/repository/runs/test_announcements.py",
    ),
    Planted(
        "another store in the place of one is not noticed by who follows it",
        "casckpt/repository/runs/announcements.py",
        "    if head is None or (isinstance(head, Announced) and before not in (None, head)):\n",
        "    if False:\n",
        "tests/repository/runs/test_announcements.py",
    ),
    Planted(
        "a watch gives up on what is announced and not there yet",
        "casckpt/repository/runs/watching.py",
        """            self._wait(txid)
        elif self._is_over""",
        """            self.drop(txid)
        elif self._is_over""",
        "tests/repository/runs/test_watching.py",
    ),
    Planted(
        "a watch does not expect the saves that are in progress",
        "casckpt/repository/runs/watching.py",
        """        self._note_open()
        last = newest""",
        """        last = newest""",
        "tests/repository/runs/test_watching.py",
    ),
    Planted(
        "another store in the place of one is not noticed by who watches it",
        "casckpt/repository/runs/watching.py",
        "self._expected.polls % _CHECK == 0",
        "False",
        "tests/repository/runs/test_watching.py",
    ),
    Planted(
        "a load lets go of what it holds before it reads",
        "casckpt/store/store.py",
        "            commit = held.enter_context(self.lease(ref)).commit\n",
        """            with self.lease(ref) as let_go:
                commit = let_go.commit
""",
        "tests/store/test_leases.py",
    ),
    Planted(
        "nobody takes a number that was announced and never came",
        "casckpt/upkeep/gc/settling.py",
        "            if number:\n                keep(repo, txid, number)\n",
        "            if number:\n                continue\n",
        "tests/upkeep/gc/test_settling.py",
    ),
    Planted(
        "forgotten checkpoints are no roots of a gc",
        "casckpt/upkeep/gc/marking.py",
        "return commit.live or (commit.txid not in ended",
        "return commit.visible or (not commit.live and commit.txid not in ended",
        "tests/upkeep/gc/test_waiting.py",
    ),
    Planted(
        "a gc leaves forgotten what an earlier one forgot beside a tag",
        "casckpt/upkeep/gc/gc.py",
        "        bring_back(repo, plan, done)\n",
        "",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a gc restores what is forgotten by its name, and held",
        "casckpt/upkeep/gc/retiring.py",
        "    return {name: tag for name, tag in named.items() if tag.expires is None}\n",
        "    return dict(named)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a gc that restores takes a later number",
        "casckpt/upkeep/gc/retiring.py",
        "    _each_unless_changed(repo, lambda repo, commit: append(repo, commit, Restored), wanted, done.restored)\n",
        "    _each_unless_changed(repo, restore, wanted, done.restored)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a gc that restores lists tags before it reads logs",
        "casckpt/upkeep/gc/retiring.py",
        "    now = repo.clock()\n    visible = {",
        "    commits, now = list_commits(repo), repo.clock()\n    visible = {",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "who has thinned does not list tags again",
        "casckpt/upkeep/thinning.py",
        "_barring(repo, tagged=plan.tagged) if made else {})",
        "{})",
        "tests/upkeep/test_thinning.py",
    ),
    Planted(
        "a gc undoes at once what was thinned beside a tag that is about to move",
        "casckpt/upkeep/gc/retiring.py",
        ' if one.last == "replaced" and one.changed_at <= since)',
        ' if one.last == "replaced")',
        "tests/upkeep/test_thinning.py",
    ),
    Planted(
        "what was thinned by one that was killed stays so, though it is tagged",
        "casckpt/upkeep/gc/settling.py",
        "    for commit in thinned_though_claimed(repo, listed, since):\n",
        "    for commit in ():\n",
        "tests/upkeep/test_thinning.py",
    ),
    Planted(
        "a tag takes what was thinned meanwhile for what it was set on",
        "casckpt/repository/tags.py",
        "    elif now.txid != commit.txid and now.dropped not in (None, commit.dropped):\n",
        "    elif False:\n",
        "tests/upkeep/test_thinning.py",
    ),
    Planted(
        "tags are not listed again right before a purge",
        "casckpt/upkeep/gc/retiring.py",
        "    tagged = _barred(repo, [*plan.purge, *done.forgotten])\n",
        "    tagged: set[TxId] = set()\n",
        "tests/upkeep/gc/test_gc.py",
    ),
    Planted(
        "tags are listed before a gc forgets",
        "casckpt/upkeep/gc/retiring.py",
        """    _each_unless_changed(repo, forget, chosen, done.forgotten)
    # again: a tag that was set meanwhile counts, and one set later sees what is done here
    tagged = _barred(repo, [*plan.purge, *done.forgotten])
""",
        """    tagged = _barred(repo, [*plan.purge, *plan.forget])
    _each_unless_changed(repo, forget, chosen, done.forgotten)
""",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "the clock is read after tags are listed",
        "casckpt/repository/tags.py",
        "    return _read(repo, PREFIX, since, anew=anew)\n",
        "    return _read_newest(repo, PREFIX, _newest_entries(repo, PREFIX), repo.clock() - slack, anew=anew)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a purge takes a later number",
        "casckpt/repository/commits.py",
        "        if _holds(now, wanted):\n            return now\n",
        "        if _holds(now, wanted):\n            return now\n"
        "        if now.last in _AFTER[wanted]:\n            return append(repo, now, kind)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a tag bars the purge of its own commit alone",
        "casckpt/repository/tags.py",
        "    return {commit.txid for commit in commits if commit.id in named}",
        "    named = {tag.txid for tag in found.values()}  # type: ignore[misc]\n"
        "    return {commit.txid for commit in commits if commit.txid in named}",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a twin that is forgotten itself frees what a tag names",
        "casckpt/upkeep/gc/retiring.py",
        "    seen = Holdings(listed.visible())\n",
        "    ids = [one.id for one in listed.live()]\n"
        "    seen = Holdings(one for one in listed.live() if ids.count(one.id) > 1)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "what was overwritten comes back once what took its place is forgotten",
        "casckpt/upkeep/gc/retiring.py",
        " and last[one.run, one.step] == one.id]",
        "]",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a tag that expired by one's own clock counts no more for a gc",
        "casckpt/upkeep/gc/retiring.py",
        "    return tags(repo, slack=FOREIGN_CLOCKS)\n",
        "    return tags(repo)\n",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a lease is granted on what is forgotten",
        "casckpt/repository/leases.py",
        "    if not found.visible:\n        take_back",
        "    if not found.live:\n        take_back",
        "tests/repository/test_leases.py",
    ),
    Planted(
        "the log is read before a lease is put",
        "casckpt/repository/leases.py",
        "    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo, seconds))\n",
        "    seen = refresh(repo, commit)\n"
        "    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo, seconds))\n"
        "    if seen.visible:\n        return tag, seen\n",
        "tests/repository/test_leases.py",
    ),
    Planted(
        "a late renewal is not granted anew",
        "casckpt/repository/leases.py",
        "    if tag.expires is not None and repo.clock() <= tag.expires:",
        "    if tag.expires is not None:",
        "tests/repository/test_leases.py",
    ),
    Planted(
        "a renewal is in time by a clock read before it is put",
        "casckpt/repository/leases.py",
        "    made = write_generation(repo, tag.name, number + 1, commit, expires=end, unique=tag.unique)\n"
        "    if tag.expires is not None and repo.clock() <= tag.expires:",
        "    before = repo.clock()\n"
        "    made = write_generation(repo, tag.name, number + 1, commit, expires=end, unique=tag.unique)\n"
        "    if tag.expires is not None and before <= tag.expires:",
        "tests/repository/test_leases.py",
    ),
    Planted(
        "the newest generation of a tag that is over goes, too",
        "casckpt/repository/tags.py",
        "        for number in sorted(several[name])[:-1]:",
        "        for number in sorted(several[name]):",
        "tests/repository/test_tags.py",
    ),
    Planted(
        "old generations go while the newest counts",
        "casckpt/repository/tags.py",
        "several.keys() - counting.tags.keys() - counting.damaged.keys()",
        "several.keys() - counting.damaged.keys()",
        "tests/repository/test_tags.py",
    ),
    Planted(
        "a note in mirrored/ counts although the checkpoint was restored since",
        "casckpt/upkeep/copies/mirrored.py",
        "    return mirrored_key(commit.txid, commit.restored)",
        "    return mirrored_key(commit.txid)",
        "tests/upkeep/copies/test_mirrored.py",
    ),
    Planted(
        "a note in mirrored/ counts although another store is there now",
        "casckpt/upkeep/copies/mirrored.py",
        "    return (record.txid, record.mirror) == (commit.txid, mirror) and record.time >= made",
        "    return (record.txid, record.mirror) == (commit.txid, mirror)",
        "tests/store/test_mirror.py",
    ),
    Planted(
        "what a mirror had once is safe there",
        "casckpt/upkeep/copies/mirror.py",
        "visible, lives = Holdings(there.visible()), Holdings(there.live())",
        "visible, lives = Holdings(there.commits.values()), Holdings(there.commits.values())",
        "tests/store/test_mirror.py",
    ),
    Planted(
        "a gc deletes without a look at what is demanded of writers",
        "casckpt/upkeep/gc/gc.py",
        "        check_requirements(self.repo)\n        _settle_records(",
        "        _settle_records(",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "a transaction asks what is demanded of writers before it is open",
        "casckpt/repository/transactions.py",
        """    repo.put_record(transaction_key(txid), began)
    return _allowed(repo, Transaction(repo, began, seconds=seconds, seen=seen))
""",
        """    check_requirements(repo)
    repo.put_record(transaction_key(txid), began)
    return Transaction(repo, began, seconds=seconds, seen=seen)
""",
        "tests/repository/test_requirements.py",
    ),
    Planted(
        "a record that is there is taken for durable",
        "casckpt/repository/repository.py",
        "                self.settle(key)\n",
        "                pass\n",
        "tests/repository/test_repository.py tests/store/test_durable.py",
    ),
    Planted(
        "a commit that is there is taken for durable",
        "casckpt/repository/transactions.py",
        "            self._repo.settle(commit_key(self.txid))\n",
        "            pass\n",
        "tests/store/test_durable.py",
    ),
    Planted(
        "a commit's name is not made durable",
        "casckpt/storage/local/store.py",
        "            if settle:  # also",
        "            if settle and folder != 'commits':  # also",
        "tests/store/test_power.py",
    ),
    Planted(
        "a gc deletes for records that are not durable",
        "casckpt/upkeep/gc/gc.py",
        """        _settle_records(self.repo)
        _delete(""",
        "        _delete(",
        "tests/upkeep/gc/test_gc.py",
    ),
    Planted(
        "a gc undoes what somebody forgot by name",
        "casckpt/upkeep/gc/retiring.py",
        "partial(restore, as_read=True)",
        "restore",
        "tests/upkeep/gc/test_retiring.py",
    ),
    Planted(
        "who thins undoes what somebody forgot by name",
        "casckpt/upkeep/thinning.py",
        "restore(repo, _replaced(before[commit.id], commit), as_read=True)",
        "restore(repo, before[commit.id])",
        "tests/upkeep/test_thinning.py",
    ),
    Planted(
        "a tag that is not granted stays",
        "casckpt/repository/tags.py",
        """            take_back(repo, tag, found.tags.get(name))
            raise
    elif""",
        """            raise
    elif""",
        "tests/repository/test_tags.py",
    ),
    Planted(
        "a signature of another checkpoint counts",
        "casckpt/repository/signatures/signed.py",
        '    return DOMAIN + id.encode() + b"\\n"',
        "    return DOMAIN",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a manifest is proved by its head alone",
        "casckpt/format/sections/pieces.py",
        "        return cell_digest(data) == self._hashes[_HASH * group : _HASH * (group + 1)]\n",
        "        return True\n",
        "tests/store/test_forged.py",
    ),
    Planted(
        "a section is copied that the index does not name",
        "casckpt/format/manifest.py",
        "            if name in _READERS and not getattr(self, _READERS[name]).prove(data):\n",
        "            if False:\n",
        "tests/store/test_forged.py",
    ),
    Planted(
        "a manifest that is held is that of any id",
        "casckpt/repository/manifests.py",
        "    if held is not None and held.id == record.manifest and not held.is_spoilt:\n",
        "    if held is not None and not held.is_spoilt:\n",
        "tests/store/test_forged.py",
    ),
    Planted(
        "a folder's own store is asked for no signature",
        "casckpt/frontends/stores.py",
        "    opened.repository.trusted = like.repository.trusted\n",
        "",
        "tests/frontends/megatron/test_training_loop.py",
    ),
    Planted(
        "verify=False may be said where signatures are required",
        "casckpt/repository/signatures/signed.py",
        "    if repo.trusted is not None and not verify:",
        "    if False:",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a record that is false is read by another commit of the id that it names",
        "casckpt/repository/manifests.py",
        "left = [one for one in others(repo, commit.id, tried) if _said(one.committed) == said]",
        "left = others(repo, commit.id, tried)",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a commit record may be that of another run and step",
        "casckpt/repository/commits.py",
        "    if isinstance(record, Committed) and (run_hash(record.run), record.step) != (name.run_hash, name.step):",
        "    if False:",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "what was found by its id is whatever its record says now",
        "casckpt/repository/refs.py",
        "now is not None and now.live and now.answers and now.id == commit.id else None",
        "now is not None and now.live and now.answers else None",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "metadata is the record's where only what is signed counts",
        "casckpt/checkpoint/handle.py",
        "        if self.repo.trusted is not None:  # a signature does not cover the record\n",
        "        if False:\n",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a save is signed after its commit",
        "casckpt/checkpoint/saving/leader.py",
        """        sign_save(self.repo, record.manifest)
        self._transaction.commit(record)
""",
        """        self._transaction.commit(record)
        sign_save(self.repo, record.manifest)
""",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a gc deletes signatures of what lives",
        "casckpt/repository/signatures/signed.py",
        "    gone = purged - {one.id for one in commits.live()} - copied",
        "    gone = purged",
        "tests/store/test_signatures.py",
    ),
    Planted(
        "a copy leaves signatures behind",
        "casckpt/upkeep/copies/copying.py",
        """    copy_signatures(source, target, {commit.id for commit in (*plan.missing, *plan.present)})
""",
        "",
        "tests/upkeep/copies/test_signatures.py",
    ),
    Planted(
        "the mirror is not asked again right before a purge",
        "casckpt/upkeep/gc/retiring.py",
        "    unsafe = _unsafe(repo, due, settings.mirror)",
        "    unsafe = _unsafe(repo, due, None)",
        "tests/upkeep/gc/test_gc.py",
    ),
    Planted(
        "errors of a delete are ignored",
        "casckpt/upkeep/gc/gc.py",
        """        for _ in in_parallel(repo.storage.traits.parallel, repo.storage.delete, part, name="gc"):
            progress(1)
""",
        """        for key in part:
            try:
                repo.storage.delete(key)
            except OSError:
                pass
            progress(1)
""",
        "tests/upkeep/gc/test_marking.py",
    ),
    Planted(
        "cells that a load wants in part are not compared",
        "casckpt/checkpoint/loading/transfer.py",
        "            elif self.verify and unit.digest is not None and cell_digest(data) != unit.digest:",
        "            elif in_place and unit.digest is not None and cell_digest(data) != unit.digest:",
        "tests/store/test_damage.py",
    ),
    Planted(
        "only half of a digest is compared",
        "casckpt/checkpoint/loading/transfer.py",
        "            elif self.verify and unit.digest is not None and cell_digest(data) != unit.digest:",
        "            elif self.verify and unit.digest is not None and cell_digest(data)[:16] != unit.digest[:16]:",
        "tests/store/test_damage.py",
    ),
    Planted(
        "a cell that was decoded is not compared",
        "casckpt/checkpoint/loading/transfer.py",
        "            if not self.verify or cell_digest(into) == cell.digest:",
        "            if into:",
        "tests/checkpoint/loading/test_coded.py",
    ),
    Planted(
        "a lease takes a name that somebody else has used since",
        "casckpt/repository/leases.py",
        "(number != behind or found.tags or found.damaged)",
        "found.damaged",
        "tests/repository/test_leases.py",
    ),
    Planted(
        "what lies apart in a buffer goes to a GPU in one copy",
        "casckpt/checkpoint/loading/items.py",
        "(run.box, run.hi, run.stop) == (unit.box, unit.lo, start)",
        "(run.box, run.hi) == (unit.box, unit.lo)",
        "tests/checkpoint/loading/test_items.py",
    ),
    Planted(
        "cells that do not follow each other come from a GPU in one copy",
        "casckpt/checkpoint/saving/copying.py",
        "if other.memory is not cell.memory or other.start != stop or",
        "if other.memory is not cell.memory or",
        "tests/checkpoint/saving/test_copying.py",
    ),
    Planted(
        "a part of a tensor on a GPU is taken for its begin",
        "casckpt/tensors/memory.py",
        "return self._flat[region.lo - mine.lo : region.hi - mine.lo]",
        "return self._flat[: region.hi - region.lo]",
        "tests/test_devices.py",
    ),
    Planted(
        "a coded cell is taken for the last of its bases",
        "casckpt/checkpoint/loading/items.py",
        "    return Item(unit, key, [], root, frames[::-1])",
        "    return Item(unit, key, [], root)",
        "tests/checkpoint/loading/test_coded.py",
    ),
    Planted(
        "the bases of a wrong cell are not compared",
        "casckpt/format/encodings/chains.py",
        "    if cell_digest(plain) != cell.digest:",
        "    if base is not None and cell_digest(plain) != cell.digest:",
        "tests/checkpoint/loading/test_coded.py",
    ),
    Planted(
        "a fetch before a load leaves out what bases need",
        "casckpt/checkpoint/loading/download.py",
        "sorted({batch.blob for batch in self._reads(wants).every})",
        "sorted({batch.blob for batch in self._reads(wants).batches})",
        "tests/checkpoint/loading/test_coded.py",
    ),
    Planted(
        "an extent may end one past its blob",
        "casckpt/format/sections/tables.py",
        "offset + (hi - lo) * itemsize > blob_sizes[blob]:",
        "offset + (hi - lo - 1) * itemsize > blob_sizes[blob]:",
        "tests/format/sections/test_tables.py",
    ),
    Planted(
        "a row may hold cells of two spans",
        "casckpt/format/sections/tables.py",
        "if not cells or number > last:",
        "if not cells:",
        "tests/format/sections/test_tables.py",
    ),
    Planted(
        "a copy does not settle the names of its blobs",
        "casckpt/upkeep/copies/replicating.py",
        "        self.target.storage.settle(uploader_folder(own))\n",
        "",
        "tests/upkeep/copies/test_replicating.py",
    ),
    Planted(
        "another's manifest in a joined copy is not looked at",
        "casckpt/upkeep/copies/replicating.py",
        "        if blobs.check(self.target, there.blobs):",
        "        if False:",
        "tests/upkeep/copies/test_replicating.py",
    ),
    Planted(
        "the digest is taken of the caller's memory, not of the buffer that is written",
        "casckpt/checkpoint/saving/upload.py",
        "source, digest = self.sources[cell.source], cell_digest(target)",
        "source, digest = self.sources[cell.source], _digest_of(cell)",
        "tests/checkpoint/saving/test_promises.py",
    ),
    Planted(
        "a new file is not synced",
        "casckpt/storage/local/newfile.py",
        "                self._fill(fd, data)\n                syscalls.link_unnamed",
        "                write_all(fd, data, 0)\n                syscalls.link_unnamed",
        "tests/storage/local/test_crash.py tests/storage/local/test_newfile.py",
    ),
    Planted(
        "a create in memory replaces",
        "casckpt/storage/memory.py",
        """            if key in self._objects:
                raise AlreadyExists(key)
            self._objects[key] = kept
""",
        """            self._objects[key] = kept
""",
        "tests/storage/test_memory.py",
    ),
    Planted(
        "a create in a folder replaces",
        "casckpt/storage/local/newfile.py",
        "                syscalls.link_unnamed(fd, folder, name)",
        "                with suppress(FileNotFoundError):\n                    os.unlink(name, dir_fd=folder)\n"
        "                syscalls.link_unnamed(fd, folder, name)",
        "tests/storage/local/test_store.py",
    ),
    Planted(
        "reused blobs are not looked at before the commit",
        "casckpt/checkpoint/saving/save.py",
        "    lost = blobs.check_reused(repo, txid, [known.blobs[number] for number in sorted(reused)])",
        "    lost = blobs.check_reused(repo, txid, [])",
        "tests/store/test_damage.py tests/checkpoint/saving/test_reuse.py",
    ),
    Planted(
        "what was committed while gc waited is no root",
        "casckpt/upkeep/gc/gc.py",
        "        spare_roots(self.repo, paused.candidates, commits)\n",
        "",
        "tests/upkeep/gc/test_interleavings.py",
    ),
    Planted(
        "gc does not wait for open transactions",
        "casckpt/upkeep/gc/gc.py",
        "        if waited.still:\n            return False",
        "        if False:\n            return False",
        "tests/upkeep/gc/test_waiting.py",
    ),
    Planted(
        "a minimum age is ignored",
        "casckpt/upkeep/gc/retiring.py",
        "        elif until > now and",
        "        elif until > now + (1 << 60) and",
        "tests/upkeep/gc/test_gc.py",
    ),
    Planted(
        "a mirror is noted before the copy",
        "casckpt/upkeep/copies/copying.py",
        """        replica = replicate(source, target, commit, work)
        if is_mirror:
            note(source, commit, target.storage.url)
""",
        """        if is_mirror:
            note(source, commit, target.storage.url)
        replica = replicate(source, target, commit, work)
""",
        "tests/upkeep/copies/test_replicating.py",
    ),
    Planted(
        "the newest of a run goes with a rule",
        "casckpt/plan/retention.py",
        "    keep = {one.txid for one in newest_of(current)} | {one.txid",
        "    keep = {one.txid",
        "tests/plan/test_retention.py",
    ),
    Planted(
        "tagged ones go with a rule",
        "casckpt/plan/retention.py",
        "if one.txid in chosen and one.txid not in tagged]",
        "if one.txid in chosen]",
        "tests/plan/test_retention.py",
    ),
    Planted(
        "a bare number is a duration",
        "casckpt/plan/durations.py",
        'return 0.0 if duration.strip() == "0" else None',
        "return float(duration) if duration.strip().isdecimal() else None",
        "tests/plan/test_durations.py",
    ),
    Planted(
        "lost records are no reason to refuse",
        "casckpt/upkeep/gc/gc.py",
        "        check_recorded(self.repo, paused.candidates.sizes, commits.commits)\n",
        "",
        "tests/upkeep/test_lost.py",
    ),
    Planted(
        "a rule chooses although records are lost",
        "casckpt/upkeep/gc/gc.py",
        "    check_recorded(repo, stock.sizes, commits.commits)\n",
        "",
        "tests/upkeep/test_lost.py",
    ),
    Planted(
        "marked blobs are reused",
        "casckpt/checkpoint/saving/known.py",
        "frozenset(blobs.damaged_marks(repo) if commits else ())",
        "frozenset()",
        "tests/checkpoint/saving/test_reuse.py",
    ),
    Planted(
        "ranks may name different references",
        "casckpt/checkpoint/agreement.py",
        "    if len(ranks_of) > 1:",
        "    if len(ranks_of) > len(given):",
        "tests/checkpoint/test_agreement.py",
    ),
    Planted(
        "ranks may use different stores",
        "casckpt/checkpoint/agreement.py",
        '            raise self._apart(repo, "a copy")',
        "            return",
        "tests/checkpoint/test_agreement.py tests/checkpoint/saving/test_save_ranks_failing.py",
    ),
    Planted(
        "what an update made is not compared",
        "casckpt/checkpoint/loading/update.py",
        "    if cell_digest(plain) != step.cell.digest:\n",
        "    if False:\n",
        "tests/checkpoint/loading/test_update.py",
    ),
    Planted(
        "a checked update leaves what did not change",
        "casckpt/checkpoint/loading/update.py",
        "        if old == cell.digest and not self.check:\n",
        "        if old == cell.digest:\n",
        "tests/checkpoint/loading/test_update.py",
    ),
    Planted(
        "a difference is added to tied weights once for each name",
        "casckpt/checkpoint/loading/update.py",
        "steps.setdefault((old, cell.digest), ",
        "steps.setdefault((id(at.sink), old, cell.digest), ",
        "tests/checkpoint/loading/test_update.py",
    ),
    Planted(
        "autograd is not told of an update of what is equal",
        "casckpt/checkpoint/loading/update.py",
        "        note_writes(tensor for want in wants for tensor in want.sink.written)\n",
        "",
        "tests/checkpoint/loading/test_update.py",
    ),
    Planted(
        "older generations go before the command has returned 0",
        "casckpt/frontends/follow.py",
        "        if current not in every or current != self._at(_TOLD):\n",
        "        if current not in every:\n",
        "tests/frontends/test_follow.py",
    ),
    Planted(
        "a command that a kill left out is not called again",
        "casckpt/frontends/follow.py",
        "        if held is not None and held != self._at(_TOLD):\n",
        "        if False:\n",
        "tests/frontends/test_follow.py",
    ),
    Planted(
        "a new generation trusts what stands in the one before",
        "casckpt/frontends/windows.py",
        "            change(self._download, wants, held, 0, check=True)\n",
        "            change(self._download, wants, held, 0, check=False)\n",
        "tests/frontends/test_follow.py",
    ),
    Planted(
        "two may follow with one folder",
        "casckpt/frontends/follow.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/frontends/test_follow.py",
    ),
    Planted(
        "a follower goes into any folder",
        "casckpt/frontends/follow.py",
        "        if not is_ours and not _LEFT.fullmatch(path.name):\n",
        "        if False:\n",
        "tests/frontends/test_follow.py",
    ),
    Planted(
        "a file is sent by a name that may mean another one meanwhile",
        "casckpt/frontends/serve/app.py",
        "    if rest[0] != commit:\n",
        "    if False:\n",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "any token is let through",
        "casckpt/frontends/serve/access.py",
        "        if not any([hmac.compare_digest(given.encode(), one.encode()) for one in self.tokens]):",
        "        if not given:",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "any host's name is served",
        "casckpt/frontends/serve/access.py",
        "            is_ours = name in _LOCAL or is_loopback(name)\n",
        "            is_ours = True\n",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "what is sent is not held",
        "casckpt/frontends/serve/leases.py",
        "                taken.enter_context(self._store.lease(checkpoint, expires=_EXPIRES))\n",
        "                pass\n",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "leases are tags of a hub",
        "casckpt/frontends/serve/hub.py",
        " for name, one in self.store.tags().items() if not _LEASE.fullmatch(name)}",
        " for name, one in self.store.tags().items()}",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "a range of another version is sent to who asked for a part of what he has",
        "casckpt/frontends/serve/app.py",
        '    is_current = request.headers.get("if-range", etag) == etag\n',
        "    is_current = True\n",
        "tests/frontends/serve/test_answers.py",
    ),
    Planted(
        "a save fails where it may not remove the files of its transaction",
        "casckpt/repository/transactions.py",
        "        except CasckptError as error:  # as where writers may not delete\n",
        "        except Conflict as error:\n",
        "tests/store/test_least_rights.py",
    ),
    Planted(
        "a probe fails where it may not delete what it left",
        "casckpt/repository/exclusive.py",
        "            with suppress(StorageError):  # writers need not be allowed to delete\n",
        "            with suppress(KeyError):\n",
        "tests/store/test_least_rights.py",
    ),
    Planted(
        "what a load did not fill counts as held",
        "casckpt/checkpoint/loading/load_plan.py",
        "        is_new = key in self._not_held or entry.key in self._unread\n",
        "        is_new = False\n",
        "tests/checkpoint/loading/test_update_misused.py",
    ),
    Planted(
        "a cell that begins elsewhere is taken for one that is held",
        "casckpt/plan/routes.py",
        "        if one.lo != wanted.lo:  # a cell that begins elsewhere is another one\n",
        "        if False:\n",
        "tests/plan/test_routes.py",
    ),
    Planted(
        "a sink of which some cells are made counts as filled",
        "casckpt/checkpoint/loading/update.py",
        "if made[id(want.sink)] < self._cells[id(want.sink)]]",
        "if not made[id(want.sink)]]",
        "tests/checkpoint/loading/test_update.py",
    ),
    Planted(
        "what is purged while it is read is damaged",
        "casckpt/checkpoint/loading/damage.py",
        "    if mine and not any(commit.live for commit in mine):\n",
        "    if False:\n",
        "tests/store/test_gone.py",
    ),
    Planted(
        "a checkpoint that is held is not looked at again",
        "casckpt/repository/refs.py",
        "now is not None and now.live and now.answers and now.id == commit.id else None",
        "now is not None and now.id == commit.id else None",
        "tests/repository/test_refs.py",
    ),
    Planted(
        "frames that are at hand are read again",
        "casckpt/checkpoint/loading/update.py",
        "is_undone, kept.get(link))",
        "is_undone, None)",
        "tests/checkpoint/loading/test_update_along.py",
    ),
    Planted(
        "autograd is not told of a load",
        "casckpt/checkpoint/loading/download.py",
        "        note_writes(tensor for want in wants for tensor in want.sink.written)",
        "        pass",
        "tests/checkpoint/loading/test_load_autograd.py",
    ),
    Planted(
        "a manifest's hash is not compared",
        "casckpt/format/manifest.py",
        "        if found[INDEX].digest.hex() != id:",
        "        if False:",
        "tests/format/test_manifest.py",
    ),
    Planted(
        "a manifest is not the one that its record names",
        "casckpt/format/sections/head.py",
        "    if wanted is not None and digest.hex() != wanted:",
        "    if False:",
        "tests/format/sections/test_head.py tests/store/test_damage.py",
    ),
    Planted(
        "a piece of a manifest is taken without its hash",
        "casckpt/format/sections/pieces.py",
        "self._held[group] = part if right else None",
        "self._held[group] = part",
        "tests/format/sections/test_pieces.py",
    ),
    Planted(
        "a record may say other than its manifest",
        "casckpt/repository/manifests.py",
        "    if _said(record) != _said(body):",
        "    if False:",
        "tests/repository/test_manifests.py",
    ),
    Planted(
        "a manifest is put back with other bytes",
        "casckpt/upkeep/repair/manifest_repair.py",
        "        if made is not None and made.head == wanted:",
        "        if made is not None:",
        "tests/upkeep/repair/test_repair.py",
    ),
    Planted(
        "rotation takes what is not safe in the mirror",
        "casckpt/upkeep/gc/retiring.py",
        "    unsafe = {commit.txid for commit in unmirrored(repo, wanted, settings.mirror)}",
        "    unsafe: set[TxId] = set()",
        "tests/frontends/trainer/test_retention.py",
    ),
    Planted(
        "ranks are not compared at all before a load",
        "casckpt/checkpoint/loading/load.py",
        "        check_same([one.ref for one in told])\n",
        "",
        "tests/checkpoint/test_agreement.py",
    ),
    Planted(
        "a create in a bucket replaces",
        "casckpt/storage/remote/s3/client.py",
        'self._put(key, data, put_id, IfNoneMatch="*")',
        "self._put(key, data, put_id)",
        "tests/storage/remote/test_store.py",
    ),
    Planted(
        "a put whose answer was lost is taken for another's",
        "casckpt/storage/remote/store.py",
        "            if self._put_id(key) != put_id:\n                raise\n",
        "            raise\n",
        "tests/storage/remote/test_faults.py",
    ),
    Planted(
        "another's object is taken for what we put",
        "casckpt/storage/remote/store.py",
        "            if self._put_id(key) != put_id:",
        "            if self._put_id(key) is None:",
        "tests/storage/remote/test_store.py",
    ),
    Planted(
        "a listing of a bucket ends with its first page",
        "casckpt/storage/remote/store.py",
        "            after = page.after\n            if after is None:",
        "            if True:",
        "tests/storage/remote/test_store.py",
    ),
    Planted(
        "a read in a bucket ends a byte early",
        "casckpt/storage/remote/s3/client.py",
        'f"bytes={offset}-{end - 1}"',
        'f"bytes={offset}-{end - 2}"',
        "tests/storage/remote/test_store.py",
    ),
    Planted(
        "a delete that a bucket refuses counts as done",
        "casckpt/storage/remote/s3/client.py",
        """            answer = self.call("delete_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) != 404:""",
        """            answer = self.call("delete_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) not in (403, 404):""",
        "tests/storage/remote/test_faults.py",
    ),
    Planted(
        "a reader in a bucket mixes objects of one size",
        "casckpt/storage/remote/s3/client.py",
        "        if (self._etag, self._size) != (etag, size):",
        "        if self._size != size:",
        "tests/storage/remote/test_store.py",
    ),
    Planted(
        "what fails for a moment is not tried again",
        "casckpt/storage/remote/store.py",
        "pause = next(pauses, None) if failure.again else None",
        "pause = None",
        "tests/storage/remote/test_faults.py",
    ),
    Planted(
        "a silent server is waited for without an end",
        "casckpt/storage/remote/patience.py",
        "        return self._seconds - self._spent\n",
        "        return 1e9\n",
        "tests/storage/remote/test_patience.py",
    ),
    Planted(
        "a commit whose answer was lost counts as failed",
        "casckpt/repository/transactions.py",
        """            try:
                record = self._committed(record)
            except CasckptError:
                raise error from None
""",
        "            raise\n",
        "tests/repository/test_transactions.py tests/upkeep/repair/test_repair.py",
    ),
    Planted(
        "whatever was committed under a transaction's name counts as its checkpoint",
        "casckpt/repository/transactions.py",
        "        if isinstance(found, Committed) and found.manifest == wanted.manifest:",
        "        if isinstance(found, Committed):",
        "tests/repository/test_transactions.py",
    ),
    Planted(
        "bytes that are held are a base whatever their digest",
        "casckpt/checkpoint/saving/coding.py",
        "if held is None or held.digest != old.digest or len(",
        "if held is None or len(",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "bytes that one save changes are held for another",
        "casckpt/checkpoint/saving/held.py",
        "        return self._cells.pop(name, None)\n",
        "        return self._cells.get(name)\n",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "a frame is stored without a look at what it decodes to",
        "casckpt/checkpoint/saving/coding.py",
        "    if _equal(base, plain):\n",
        "    if base.nbytes == plain.nbytes:\n",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "an older version is not compared with what the manifest says of it",
        "casckpt/checkpoint/saving/coding.py",
        "    if [one.base for one in frames] != [one.digest for one in bases]:\n",
        "    if len(frames) != len(bases):\n",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "cells that left the state are held on",
        "casckpt/checkpoint/saving/coding.py",
        "    kept.held.only(coder.names)\n",
        "",
        "tests/checkpoint/saving/test_kept.py",
    ),
    Planted(
        "a right leaf takes away the mark on a wrong frame",
        "casckpt/upkeep/repair/verify.py",
        "        healed -= blobs.frame_marks(repo)\n",
        "        healed -= set()\n",
        "tests/upkeep/repair/test_coded.py",
    ),
    Planted(
        "a base that was made of a later version is not compared",
        "casckpt/upkeep/repair/salvage.py",
        "        if cell_digest(plain) != digest:\n            return False\n        target[:] = plain\n",
        "        target[:] = plain\n",
        "tests/upkeep/repair/test_coded.py",
    ),
    Planted(
        "a copy takes frames as they come",
        "casckpt/upkeep/recoding.py",
        "        if cell_digest(found) != cell.digest:\n",
        "        if not found:\n",
        "tests/upkeep/copies/test_recoded.py",
    ),
    Planted(
        "bases are not looked at before the commit",
        "casckpt/checkpoint/saving/upload.py",
        "mine if base is None else mine + [one.blob for one in base.chain]",
        "mine",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "a chain is one base longer than it may be",
        "casckpt/plan/bases.py",
        "    if len(deltas) < MAX_DELTAS:\n",
        "    if len(deltas) <= MAX_DELTAS:\n",
        "tests/plan/test_bases.py",
    ),
    Planted(
        "what only bases use of a blob is not counted",
        "casckpt/plan/reuse.py",
        "for one in ((extent,) if extent.coding is None else extent.chain)",
        "for one in (extent,)",
        "tests/plan/test_reuse.py",
    ),
    Planted(
        "a cell is reused though a base of it may not be",
        "casckpt/plan/reuse.py",
        " and (cell.frame is None or all(self._usable[c.blob] for c in cell.chain))",
        "",
        "tests/plan/test_reuse.py",
    ),
    Planted(
        "blobs of frames are worn",
        "casckpt/plan/reuse.py",
        " and number not in framed",
        "",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "bases are read over a network",
        "casckpt/checkpoint/saving/coding.py",
        "        if self.repo.storage.traits.remote:\n            raise _TooFar\n",
        "",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "a base that nothing else needs is left out of the blobs of a checkpoint",
        "casckpt/checkpoint/saving/shares.py",
        "        return number(known.blobs[cell.blob]), cell.offset\n",
        "        return numbers.get(known.blobs[cell.blob], 0), cell.offset\n",
        "tests/checkpoint/saving/test_coding.py",
    ),
    Planted(
        "what the parent was never asked is taken for told",
        "casckpt/checkpoint/saving/looking.py",
        "        if not is_as_before or source.name in self.unknown:\n",
        "        if not is_as_before:\n",
        "tests/checkpoint/saving/test_health.py",
    ),
    Planted(
        "negative numbers are not looked at",
        "casckpt/checkpoint/saving/looking.py",
        '    return max(int(most(bits.view(f"<i{kind.width}"))), int(most(bits)) - (1 << (8 * kind.width - 1)))\n',
        '    return max(int(most(bits.view(f"<i{kind.width}"))), 0)\n',
        "tests/checkpoint/saving/test_health.py",
    ),
    Planted(
        "a NaN counts more than the user's word",
        "casckpt/checkpoint/saving/leader.py",
        "        return False if word is None else word\n",
        "        return False\n",
        "tests/checkpoint/saving/test_health.py",
    ),
    Planted(
        "the digest of a tensor is known by its cells, wherever they are",
        "casckpt/checkpoint/loading/digests.py",
        "form.encode() + bytes(manifest.raw_cells(entry))",
        "form.encode() + bytes().join(extent.digests for extent in manifest.cells(entry).extents)",
        "tests/checkpoint/loading/test_digests.py",
    ),
    Planted(
        "a table in one row may lie outside its blob",
        "casckpt/format/sections/tables.py",
        "    if offset < DATA_OFFSET or offset + numel * itemsize > blob_sizes[blob]:\n        return None\n",
        "    if offset < DATA_OFFSET:\n        return None\n",
        "tests/format/sections/test_tables.py",
    ),
    Planted(
        "what is copied out of one read lies in one place",
        "casckpt/checkpoint/loading/transfer.py",
        "loose, used = [], used + offset - start",
        "loose, used = [], 0",
        "tests/checkpoint/loading/test_read_bytes.py",
    ),
    Planted(
        "a comparison tells places in the cell, not in the tensor",
        "casckpt/checkpoint/comparing.py",
        "(part.region.lo + int(place) for place in (places[0], places[-1]))",
        "(int(place) for place in (places[0], places[-1]))",
        "tests/checkpoint/test_comparing.py",
    ),
    Planted(
        "what others use too counts as alone",
        "casckpt/upkeep/footprint.py",
        "self.sizes[counts == self._users].sum()",
        "self.sizes[counts > 0].sum()",
        "tests/upkeep/test_footprint.py",
    ),
    Planted(
        "a blob in which a visible checkpoint has cells counts as bases",
        "casckpt/upkeep/footprint.py",
        "if named.names[number] not in told] if told else mine] = True",
        "if named.names[number] not in told and told] if told else mine[:0]] = True",
        "tests/upkeep/test_footprint.py",
    ),
)
