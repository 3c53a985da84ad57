"""What hosts add and what closed doors cost: `make bench-deployment`."""
