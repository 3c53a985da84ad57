"""Commands that plan and simulate without a running service, and the figures and pictures that they show."""
