"""LangChain's classic ReAct agent, unchanged: it stops the model before it makes up what its tool
would say.
"""

import os

from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

REACT = """Answer the question. You have these tools:

{tools}

Use this format:

Question: the question
Thought: what to do
Action: one of [{tool_names}]
Action Input: its input
Observation: its result
Thought: I know.
Final Answer: the answer

Question: {input}
Thought:{agent_scratchpad}"""


@tool("add")
def add_text(numbers: str) -> int:
    """Add two numbers with a comma between them."""
    return sum(int(number) for number in numbers.split(","))


def test_react_sees_the_tools_observation_and_not_one_that_the_model_made_up() -> None:
    adds = ChatOpenAI(
        model="gpt-5",
        base_url=os.environ["VLA_RL_BASE_URL"],
        api_key=os.environ["VLA_RL_CALCULATOR"],
    )
    agent = create_react_agent(adds, [add_text], PromptTemplate.from_template(REACT))
    executor = AgentExecutor(
        agent=agent, tools=[add_text], max_iterations=3, return_intermediate_steps=True
    )
    outcome = executor.invoke({"input": "What is 2 plus 3?"})
    assert outcome["output"] == "5"
    ((action, observation),) = outcome["intermediate_steps"]
    assert (action.tool, action.tool_input, observation) == ("add", "2, 3", 5)
    assert "Observation" not in action.log
