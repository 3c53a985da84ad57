"""What releases have stored and sent, recorded from real runs, which later releases must read (docs/upgrading.md)."""
