"""What all hosts need."""
