"""`headrace simulate-failures`: an availability trace, and what recovery makes of it."""
