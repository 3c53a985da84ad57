"""Forecasts of failures: an availability trace under Headrace's recovery and under that of others. No live job uses this."""
