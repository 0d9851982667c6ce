"""How ranks talk: the mesh, rotation along a ring, gathering. Nothing here knows what attention is."""
