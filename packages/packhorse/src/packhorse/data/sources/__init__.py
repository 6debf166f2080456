"""Sources of a corpus: files and folders of any kind, cut into chunks and read as documents."""
