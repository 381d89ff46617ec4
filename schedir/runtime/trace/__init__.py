"""Traces: what ranks record of their steps, and the timelines that are made of it."""
