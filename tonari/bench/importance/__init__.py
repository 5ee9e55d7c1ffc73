"""What deciding on rows and scoring them cost."""
