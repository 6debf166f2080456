"""What commands report: tables, plots and dated notes, and the padded encoders for comparison.

Internal: the commands that print them are public, these modules are not.
"""
