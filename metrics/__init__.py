"""Metrics are data: one table says what is measured, one recorder sets it from one stats object a
step and one call a reply; nothing here knows how a token is made."""
