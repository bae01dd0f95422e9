"""gc: what is forgotten, what is purged, what is deleted, and when that is safe."""
