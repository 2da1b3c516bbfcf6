"""Records into documents: terminal text, model card, pages."""
