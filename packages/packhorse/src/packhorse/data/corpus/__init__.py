"""The corpus builder: sources or records in, packed shards out, on many cores or machines."""
