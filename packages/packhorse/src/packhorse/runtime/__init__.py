"""From texts to results: the offline encoder."""
