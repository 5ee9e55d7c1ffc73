"""What an exchange beside training costs."""
