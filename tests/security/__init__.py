"""What attackers try, and what must not happen. `-s` prints the measured numbers."""
