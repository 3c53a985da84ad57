"""Contracts that two or more Headrace services share: messages, value types, errors and channels."""
