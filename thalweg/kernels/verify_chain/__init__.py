"""Which drafts of each row are the tokens drawn, and what that does to its slot."""
