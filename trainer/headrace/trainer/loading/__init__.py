"""The step loader: a session with the reorder service, parts fetched from preprocessors, samples packed into tensors."""
