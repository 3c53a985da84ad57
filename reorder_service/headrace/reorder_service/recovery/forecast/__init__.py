"""Forecasts of failures: replays of availability traces under Headrace's recovery and that of others. No live job uses this."""
