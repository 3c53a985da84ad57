"""Planning of recovery without checkpoints (Oobleck): arrays and dataclasses in, dataclasses out. No I/O, no clock, no state."""
