"""Models whose frozen weights stay as they were published: in 8 bits or fewer, decoded where they are multiplied."""
