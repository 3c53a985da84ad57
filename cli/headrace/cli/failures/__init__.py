"""`headrace simulate-failures`: replays an availability trace under several recovery policies."""
