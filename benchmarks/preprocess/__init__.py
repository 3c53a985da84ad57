"""`make bench-preprocess`: codecs, delivery beside other loaders, scaling and memory."""
