"""What a decode step needs of its slots."""
