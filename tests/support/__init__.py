"""What several tests share. `tests/test_support.py` checks that this list has every module.

States, models and their comparison
    saves: stores with small cells and blobs, states to save, direct reads of stored objects; begin here
    training: small models, their training, and exact comparisons of their states
    parallel: models under every kind of parallelism, and their states as torch gathers them
    meshes: a small model that ranks can share in several ways
    looping: a whole training loop on several ranks
    lightning_training: a training with Lightning
    tensors: tensors of every dtype and layout, and their bytes
    wrappers: a hand-made wrapper of tensors, and hostile ones
    versions: versions of a state that differ slightly
    exact: comparison of plain values by type, order and bits
    plain_examples: plain values of every type
    logs: what casckpt logs
    ids: names and combinations of the cases of a table
    renames: the ``rename`` that an error suggests
    progress_calls: what a progress function received

Repositories without tensors
    repositories: repositories, commits and manifests; begin here
    checkpoints: real blobs and extents, made of numpy arrays
    geometry: random shapes, regions and partitions
    routes: ways between versions of a cell, as a reference
    gcs, copies, rewrites, coded: gc, copies, rewrites, and frames of such checkpoints
    announced: announcements, read without a follower
    hosts: hosts that change runs at random
    forging: changed manifests with correct hashes

Storage
    faulty: storage that fails, or does something else first, at a chosen call; begin here
    far: storage in memory that says that it is remote
    timed: storage whose clock a test advances
    counting: the calls and bytes of one storage
    local: folders on file systems with missing or failing features
    small_disk, full_disks, full_disk_loops: stores on small file systems that are really full
    elsewhere: the storage that ``--storage`` chooses
    servers: S3 servers on this machine
    clouds: emulators of other clouds
    buckets, bucket_reads: stores in a bucket, and what ranks read there
    proxy, quirks, hostile, certificates: networks and servers that misbehave, and https
    places: which services are safe, and how that is known
    reads: which bytes of blobs are read
    signing: keys

Ranks and processes
    ranks: the processes of process groups; begin here
    together: tensors that every rank can create, storage that counts, ways to die
    simulated: ranks that are threads
    worlds, layouts: random states, and how ranks hold them
    forks, afresh, preload, preload_megatron: children of the test's process, and of a process that has imported torch
    scripts, torchrun, recipes: scripts, modules and training programs, as users start them
    shared: folders that all workers share
    drill: a team and its store in a shared folder
    fleet: work in a store with any version of casckpt
    fleets: run such programs at the same time, as forks

Kills and power
    dying: a process that dies before or after a change of storage
    dying_follower: a follower that dies at a system call
    crash, power: puts that are killed, and a disk that loses power
    killed_saves, killed_thins, killed_writers, struck, chaos: programs that are killed or stopped at a chosen call
    killed_watch: a trainer and a watcher of its folder
    killed_when_full: programs that free a full disk, and are killed
    plain_jobs: commands as users start them, and what must hold however they end
    injected: strace makes their system calls fail
    lost_cache: LazyFS loses what they did not sync

Other programs and formats
    dcp: torch.distributed.checkpoint, and folders that it writes
    gpt, megatron_core, megatron_fsdp, torch_dist_folder: Megatron's state dicts, library and folders
    hub, hub_folders, safetensors_files, serving: models and folders of the Hugging Face Hub
    odd_files: files with tensors, and hostile ones
    stored_folder, frozen_store: stores in tests/data, and how they were written
    program_folders, deepspeed_training: folders and files that training programs write
    trees: complete comparison of two folders or files
    plain_reader: a reader that was written from docs/format.md alone
    fuzz, fuzz_decoders, fuzz_guided: changed inputs for importers and decoders

Measures
    peak, peak_convert, peak_files, peak_merge, held: memory
    tally: counts of evidence for docs/reliability.md

The suite itself
    kinds, workers: marks, and the runner with several processes
    hints: advice in messages, and the tests that follow it
    pages: code blocks of documentation pages
    commands: helpers of tests of commands
    private_names, torch_versions: what casckpt and the tests need of other packages
"""
