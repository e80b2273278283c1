"""The bridge between generation and training: a control plane (TCPStore) and a data plane (files)."""
