"""What commands report: tables, plots and dated notes, and the padded encoders for comparison."""
