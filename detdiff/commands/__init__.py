"""What the commands do besides talking to the terminal: no click here, so that each part can be called and tested."""
