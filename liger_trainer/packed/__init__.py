"""Models whose frozen weights stay as they were published: in 8 bits and fewer, decoded where they are multiplied."""
