"""The producer: reads data sets, probes and decodes samples, and serves them to trainers."""
