"""Observability of Headrace's processes: Prometheus metrics, logs, and OpenTelemetry traces."""
