"""Measurements side by side: packing plans, encoders and their peers, and the cost of padding.

This room measures and returns plain rows; the commands print them. `report` turns rows into tables,
dated notes and plots.
"""
