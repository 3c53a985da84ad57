"""What processes tell of themselves: metrics, logs and traces."""
