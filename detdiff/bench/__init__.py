"""What each batching policy costs, in counts and seconds, and what it does to the answers."""
