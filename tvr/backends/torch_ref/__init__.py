"""The reference backend: every op in plain torch, on any device torch runs on."""
