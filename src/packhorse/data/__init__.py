"""What goes in and comes out: files of texts, files of results."""
