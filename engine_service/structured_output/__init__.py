"""Output that has to have a form: a JSON schema, a regular expression, a choice, a grammar.

StructuredOutput (shared/sampling.py)
  -> GrammarDesk     keeps compiled grammars, and has others compiled beside the steps
       -> GrammarCompiler   llguidance, tried out in a process that may die of it
  -> GrammarState    where one sequence stands; the scheduler advances it token by token
       -> token_mask        what the sampler may draw from
"""
