"""Files of results: rows as bytes, and a file that survives being killed."""
