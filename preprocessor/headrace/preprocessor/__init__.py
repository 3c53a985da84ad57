"""The preprocessor: reads shards, probes and decodes samples, and keeps decoded parts until trainers have fetched them.

The pure part, which knows nothing of jobs, networks and queues:

    access.py         the folders and URL prefixes that a job may have this process open
    sources/          shards of records: WebDataset tar, Energon, MDS, Parquet, JSONL, local or on any fsspec URL, with a cache
    records/          record.py: a row of a data set, the same for every format; record_to_sample.py: record to sample, turns of
                      text, image and audio segments
    image/            image header to patch grid, image file to patches
    audio/            audio header to frame count, recording to log-mel; flac.py: a faster decoder of long FLAC
    text/             text to token ids, where control tokens' names are text; byte_pairs.py: the same ids, faster;
                      template.py: sample to input ids and labels; templates/: prompt formats as data
    decoding.py       all of it: size a sample, decode its media, encode rows as Arrow
    decode_memory.py  the memory budget of everything that is being decoded

Around it:

    job_work.py       the work of the threads on one job; known_jobs.py: all jobs, the refused ones included
    engine.py         takes orders from the reorder service and gives them to the threads; tasks.py: its background tasks
    payload/          payload_store.py: parts within a byte budget, what is read and decoded next (staging.py, priority.py) and
                      what is evicted; part.py: a part, from its lease to its payload; probe_cache.py: what stays from probing to
                      decoding; writer.py: decodes media where trainers will read them; arena.py: the shared memory that
                      trainers on this host read in place; gauges.py: how full the stages are, for the metrics
    server.py         the servers that trainers fetch from

Damaged data raises a BadSampleError with one reason: it ends one sample, never the process.
"""
