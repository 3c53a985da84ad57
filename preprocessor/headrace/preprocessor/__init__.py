"""The preprocessor: reads shards, probes and decodes samples, keeps what it decoded until a trainer has fetched it.

The pure part, which knows nothing of jobs, networks and queues:

    access.py     what a job may have this process open: folders and beginnings of URLs
    sources/      shards of records: WebDataset tar, Energon, MDS, Parquet, JSONL, local or on any fsspec URL, with a cache
    record.py     one row of a data set, the same for every format
    mapping.py    record to sample: turns of text, image and audio segments
    image/        image header to patch grid, image to patches
    audio.py      audio header to frame count, recording to log-mel; flac.py: a faster decoder of long FLAC
    text.py       text to token ids; control tokens' names are text; byte_pairs.py: the same ids sooner
    template.py   sample to input ids and labels; templates/: prompt formats as data
    pipeline.py   all of it: probe(record), decode(record), encode(rows) as Arrow

Around it:

    jobs.py       a job's shards and pipeline: what worker threads do; known_jobs.py: all of them, and those that are refused
    writer.py     payload into its place: media are decoded where trainers will read them
    part.py       a part: a lease, then media in memory, then payload
    engine.py     takes orders from the reorder service and gives them to the threads; tasks.py: its background tasks
    store.py      parts within a byte budget: what is read and decoded next (staging.py, priority.py), what makes room
    occupancy.py  how full the stages are, for the metrics
    arena.py      the shared memory in which payload lies, for trainers on this host to read in place
    server.py     trainers fetch here

Damage in the data is a BadSampleError with one reason and ends one sample, never the process.
"""
