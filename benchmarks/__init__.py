"""Measurements against published figures and peers. Each benchmark prints one table and writes it as JSON too."""
