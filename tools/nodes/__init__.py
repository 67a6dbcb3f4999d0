"""Real runs of 16 ranks on 4 nodes, which are network namespaces of this machine."""
