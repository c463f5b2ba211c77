"""What is counted and written down while events pass, for those who look."""
