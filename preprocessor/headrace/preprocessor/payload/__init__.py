"""Parts on their way to trainers: which is read and decoded next, the memory that holds them, and their leases."""
