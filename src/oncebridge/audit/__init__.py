"""What duplicates a recording holds, why, and what to do about them."""
