"""The methods of the client, by what they are about; each is one function of the schema."""
