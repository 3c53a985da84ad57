"""The step loader: it holds a session with the reorder service, fetches parts from preprocessors and packs them into tensors."""
