"""The preprocessor: reads shards, probes and decodes samples, keeps what it decoded until a trainer has fetched it.

The pure part, which knows nothing of jobs, networks and queues:

    sources/      shards of records: WebDataset tar, Parquet, JSONL, local or on any fsspec URL
    record.py     one row of a data set, the same for every format
    mapping.py    record to sample: turns of text, image and audio segments
    image.py      image header to patch grid, image to patches
    audio.py      audio header to frame count, recording to log-mel
    text.py       text to token ids; control tokens' names are text
    template.py   sample to input ids and labels; templates/: prompt formats as data
    pipeline.py   all of it: probe(record), decode(record), encode(rows) as Arrow

Around it:

    jobs.py       a job's shards and pipeline: what worker threads do
    engine.py     takes orders from the reorder service and gives them to the threads
    store.py      decoded parts within a byte budget: what is decoded next, what makes room
    arena.py      the shared memory in which they lie, for trainers on this host to read in place
    server.py     trainers fetch here

Damage in the data is a BadSampleError with one reason and ends one sample, never the process.
"""
