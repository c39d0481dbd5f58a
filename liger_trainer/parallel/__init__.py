"""Operators over several processes: a head split by vocabulary, and experts split over processes."""
