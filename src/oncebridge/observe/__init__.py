"""Counters, worker reports, history, metrics, traces and charts."""
