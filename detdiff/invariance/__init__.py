"""Invariance as a fix: kernels pinned so that a row's bits depend on the row alone, found, checked and priced here."""
